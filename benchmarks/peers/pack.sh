#!/usr/bin/env bash
# pack.sh FOLDER [SET…]: the peers' wheels for CPython 3.12 on Linux x86-64, unpacked and packed
# again as FOLDER/SET.txz, for a GPU machine without a network.  There `tar xJf FOLDER/SET.txz -C
# peers` and PYTHONPATH=src:peers/SET are enough.  MACE's e3nn is another one than that of `small`.
set -eu -o pipefail
folder=$(realpath -m "$1")
shift
declare -A peers=(
  [mace]='ase==3.29.0 wcwidth==0.9.4 lmdb==3.0.0 matscipy==1.3.1 e3nn==0.4.4 mace-torch==0.3.16
    orjson==3.13.0 prettytable==3.18.0 torch-ema==0.3 vesin==0.6.2 opt_einsum_fx==0.1.4 configargparse'
  [cuequivariance]='cuequivariance==0.13.0 cuequivariance-torch==0.13.0 cuequivariance-ops-cu13==0.13.0
    cuequivariance-ops-torch-cu13==0.13.0 platformdirs'
  [spconv]='spconv-cu126==2.3.8 cumm-cu126==0.7.11 pccm ccimport fire termcolor lark'
  [small]='LunaEquivariance==0.1.0 e3nn==0.6.0 spconv-triton==1.0.0 flashlib==0.4.0
    flash-sinkhorn==0.4.1'
  [networks]='lgatr==2.0.0 einops'
)
platforms=$(printf -- '--platform manylinux_2_%s_x86_64 ' 39 35 34 31 28 27 24 17 12 5)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
for set in "${@:-${!peers[@]}}"; do
  for name in ${peers[$set]}; do
    # one by one: a wheel is found under the names of platforms that its own tags list
    # shellcheck disable=SC2086
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
      --implementation cp $platforms --platform manylinux2014_x86_64 -d "$work/wheels" "$name"
  done
  mkdir "$work/$set"
  for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/$set"; done
  tar c -C "$work" "$set" | xz >"$folder/$set.txz"
  rm -r "$work/wheels" "${work:?}/$set"
done
