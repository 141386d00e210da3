"""Files of points: every format, what is refused and what is told.

Seen red with: a PLY file of vertices alone, and one that is cut off between two points; bits of
occupied voxels taken for KITTI's floats; a table's index column taken for x; a header that names no
x, y, z left out; rows of two numbers left out in silence; (3, N) read as three points; colours read
as points; a cloud of NaN alone read as an empty one; atoms read as lines of text.
"""

import sys
import types

import numpy as np
import pytest
import torch

import torchweft
from torchweft import cli
from torchweft.demo.data import SUFFIXES
from torchweft.demo.data.formats import READERS
from torchweft.demo.data.readers import read_points

POINTS = np.array([[0.5, -1.0, 2.0], [3.25, 4.0, -5.5], [6.0, 7.0, 8.125]])
PLY = "ply\nformat {} 1.0\ncomment made up\nelement vertex 3\nproperty float x\nproperty float y\n"
PLY += (
    "property uchar red\nproperty double z\nelement face 0\nproperty list uchar int i\nend_header\n"
)
PCD = "# made up\nVERSION 0.7\nFIELDS x y _ z\nSIZE 4 4 1 4\nTYPE F F U F\nCOUNT 1 1 3 1\nWIDTH 3\n"
PCD += "HEIGHT 1\nPOINTS 3\nDATA {}\n"


def _records(order, z, padding):
    fields = [("x", order + "f4"), ("y", order + "f4"), ("p", padding), ("z", order + z)]
    table = np.zeros(3, dtype=fields)
    table["x"], table["y"], table["z"] = POINTS.T
    return table.tobytes()


def _text(columns):
    return "\n".join(columns.format(*point) for point in POINTS.tolist()).encode()


FILES = {
    "a.xyz": b"x y z\n" + _text("{} {} {}"),
    "count.xyz": b"3\n" + _text("{} {} {}"),
    "b.xyz": _text("{}, {}, {}"),
    "atoms.xyz": b"3\n\n" + _text("C {} {} {}"),
    "atoms.extxyz": b'3\nProperties=id:I:1:pos:R:3 pbc="F F F"\n' + _text("7 {} {} {}"),
    "plain.csv": _text("{};{};{}"),
    "pandas.csv": b',Z,"X",Y\n' + _text('7,{2},"{0}",{1}'),
    "named.csv": b"tree, x, y, z\n" + _text("oak, {}, {}, {}"),
    "cloud_compare.txt": b"//X Y Z\n3\n" + _text("{} {} {}"),
    "saved.txt": b"# heights of trees\n" + _text("{}\t{}\t{}"),
    "a.bin": np.hstack([POINTS, np.ones((3, 1))]).astype("<f4").tobytes(),
    "ascii.ply": PLY.format("ascii").encode() + _text("{} {} 255 {}"),
    "little.ply": PLY.format("binary_little_endian").encode() + _records("<", "f8", "u1"),
    "big.ply": PLY.format("binary_big_endian").encode() + _records(">", "f8", "u1"),
    "points.ply": PLY.partition("element face")[0].format("ascii").encode()
    + b"comment\nend_header\n"
    + _text("{} {} 255 {}"),
    "ascii.pcd": PCD.format("ascii").encode() + _text("{} {} 1 2 3 {}"),
    "binary.pcd": PCD.format("binary").encode() + _records("<", "f4", "3u1"),
}


@pytest.mark.parametrize("name", FILES)
def test_reads_files(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    torch.testing.assert_close(read_points(path), torch.from_numpy(POINTS), rtol=0, atol=0)


def test_reads_numpy_and_drops_what_is_not_finite(tmp_path, capsys):
    """Seen red with: a point of 1e300 kept, points left out in silence."""
    cloud = np.vstack([POINTS, [np.nan, 0, 0], [0, 1e300, 0]])
    np.save(tmp_path / "a.npy", cloud)
    np.savez(tmp_path / "a.npz", colour=np.zeros(3), points=cloud)
    for name in ("a.npy", "a.npz"):
        assert read_points(tmp_path / name).tolist() == POINTS.tolist()
        assert f"{name}: 2 of 5 points are not finite: left out" in capsys.readouterr().err


def test_the_array_of_an_npz_is_asked_for_by_name(tmp_path):
    """Red before: the first array with three columns was read, whatever it was."""
    path = tmp_path / "a.npz"
    rotation, colours = np.eye(3), np.ones_like(POINTS)
    np.savez(path, rotation=rotation, colours=colours, pc=POINTS)
    assert read_points(path).tolist() == POINTS.tolist()
    np.savez(path, rotation=rotation, scan=POINTS)
    assert read_points(path, "scan").tolist() == POINTS.tolist()
    for name, text in ((None, "several arrays"), ("scans", "no array 'scans'")):
        match = rf"{text}: rotation \(3, 3\), scan \(3, 3\)\. .* Pass --key"
        with pytest.raises(torchweft.ShapeError, match=match):
            read_points(path, name)
    np.savez(path, points=POINTS, xyz=POINTS)
    with pytest.raises(torchweft.ShapeError, match=r"several arrays: points .*, xyz"):
        read_points(path)
    np.savez(path, scan=POINTS)
    assert read_points(path).tolist() == POINTS.tolist()
    np.save(tmp_path / "a.npy", POINTS)
    with pytest.raises(torchweft.ShapeError, match=r"the key 'scan': only \.npz and \.pt .* Leave"):
        read_points(tmp_path / "a.npy", "scan")


@pytest.mark.parametrize("shape", [(3, 9), (4, 9), (3, 4), (6, 7)])
def test_points_in_columns_are_refused(tmp_path, shape):
    """Red before: (3, N) was read as three points."""
    np.save(tmp_path / "a.npy", np.ones(shape))
    np.savez(tmp_path / "a.npz", points=np.ones(shape))
    np.savetxt(tmp_path / "a.csv", np.ones(shape), delimiter=",")
    torch.save(torch.ones(shape), tmp_path / "a.pt")
    for name in ("a.npy", "a.npz", "a.csv", "a.pt"):
        with pytest.raises(
            torchweft.ShapeError, match=rf"{shape[0]} rows of {shape[1]} .*points\.T"
        ):
            read_points(tmp_path / name)


@pytest.mark.parametrize("command", ["inspect", "demo"])
def test_the_commands_take_the_name_of_an_array(tmp_path, command, capsys):
    path = tmp_path / "a.npz"
    np.savez(path, rotation=np.eye(3), scan=np.ones((2, 2)))
    arguments = [str(path)] if command == "inspect" else ["--points", str(path)]
    arguments += ["--key", "scan", "--out", str(tmp_path / "page")]
    assert cli.main([command, *arguments]) == 1
    assert "holds an array of shape (2, 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "error", "text"),
    [
        (
            "a.obj",
            b"",
            torchweft.DTypeError,
            r"ends in '\.obj': torchweft reads \.npy .*\. Save the points",
        ),
        (
            "a.pcd",
            PCD.format("binary_compressed").encode(),
            torchweft.DTypeError,
            "DATA binary_compr",
        ),
        ("a.ply", b"ply\nformat ascii 1.0\n", torchweft.DTypeError, "no line end_header"),
        (
            "a.ply",
            PLY.format("ascii").replace("vertex", "edge").encode(),
            torchweft.DTypeError,
            "edge",
        ),
        (
            "a.ply",
            PLY.format("ascii").replace("double z", "int w").encode(),
            torchweft.ShapeError,
            r"has points of x y red w: x, y and z are needed\. .*or save the points",
        ),
        (
            "a.ply",
            FILES["little.ply"][:-1],
            torchweft.DTypeError,
            r"read as \.ply .* Save the points",
        ),
        (
            "a.ply",
            FILES["little.ply"][:-17],
            torchweft.ShapeError,
            "ends after 2 points of 3: .* Copy",
        ),
        (
            "a.pcd",
            FILES["ascii.pcd"].rpartition(b"\n")[0],
            torchweft.ShapeError,
            "ends after 2 points of 3: .* Copy",
        ),
        (
            "a.npy",
            b"hello",
            torchweft.DTypeError,
            r"read as \.npy .* a whole file .* Save the points",
        ),
        ("a.npz", b"PK", torchweft.DTypeError, r"read as \.npz .* a whole file .* Save the points"),
        ("a.npy", b"", torchweft.DTypeError, r"read as \.npy \(No data left in file\): a whole"),
        (
            "a.bin",
            FILES["a.bin"][:-1],
            torchweft.DTypeError,
            r"47 bytes .* KITTI's.* Save the points",
        ),
        (
            "a.bin",
            np.ones((4, 5), "<f4").cumsum(0).tobytes(),
            torchweft.DTypeError,
            "80 bytes .* KITTI",
        ),
        # bits of which voxels are there, as SemanticKITTI keeps them
        ("a.bin", bytes([1, 0, 0, 0] * 8), torchweft.DTypeError, "32 bytes .* KITTI"),
        ("a.xyz", b"x y z\n1 2\n", torchweft.ShapeError, "no line with three numbers: .* Write"),
        ("a.csv", b"", torchweft.ShapeError, "no line with three numbers"),
        ("a.csv", b"1,2,3\n4,5\n", torchweft.DTypeError, "as .csv .*columns changed .* a whole"),
        (
            "a.txt",
            b"1 2 3\nx 5 6\n",
            torchweft.DTypeError,
            "as .txt .*could not convert string 'x'",
        ),
        (
            "a.csv",
            b"r,g,b\n1,2,3\n",
            torchweft.ShapeError,
            r"has points of r g b: x, y and z are needed\. Name these columns x, y and z",
        ),
        ("a.xyz", b"2\n\nC 0 0 0\n", torchweft.DTypeError, "as .xyz .*1 atoms, expected 2"),
        ("a.extxyz", b"", torchweft.DTypeError, r"as \.extxyz .* a whole file"),
        ("a.pt", b"hello" * 10, torchweft.DTypeError, r"as \.pt .* a whole file"),
    ],
)
def test_teaches_what_it_reads(tmp_path, name, content, error, text):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=text):
        read_points(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.ply is not a file.*Check its path"):
        read_points(tmp_path / "none.ply")


def test_the_help_names_every_format():
    assert {word for word in SUFFIXES.split() if word.startswith(".")} == set(READERS)


@pytest.mark.parametrize("suffix", [".las", ".laz"])
def test_reads_lidar_files_in_their_unit(tmp_path, suffix):
    laspy = pytest.importorskip("laspy", reason="needs laspy, of the extra [demo]")
    header = laspy.LasHeader(point_format=3, version="1.2")
    header.scales, header.offsets = [0.125] * 3, [1000, 0, 0]
    cloud = laspy.LasData(header)
    cloud.x, cloud.y, cloud.z = POINTS.T
    cloud.write(str(tmp_path / f"a{suffix}"))
    assert read_points(tmp_path / f"a{suffix}").tolist() == POINTS.tolist()
    (tmp_path / f"b{suffix}").write_bytes(b"hello" * 100)
    match = rf"as \{suffix} \(Invalid file signature .*\): a whole file .* Save the points"
    with pytest.raises(torchweft.DTypeError, match=match):
        read_points(tmp_path / f"b{suffix}")


@pytest.mark.parametrize("package", ["ase", "laspy", "lazrs"])
def test_names_the_package_that_reads_a_format(tmp_path, monkeypatch, package):
    path = tmp_path / {"ase": "a.extxyz", "laspy": "a.las", "lazrs": "a.laz"}[package]
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "laspy", types.ModuleType("laspy"))
    monkeypatch.setitem(sys.modules, package, None)
    match = rf"{package} is not installed: it reads \{path.suffix}\. Run pip install {package}, or "
    with pytest.raises(torchweft.BackendError, match=match):
        read_points(path)


def test_reads_tensors(tmp_path):
    points = torch.from_numpy(POINTS)
    for tensor in (points, points.clone().requires_grad_(), points.bfloat16()):
        torch.save(tensor, tmp_path / "a.pt")
        assert read_points(tmp_path / "a.pt").tolist() == tensor.double().tolist()
    torch.save({"faces": torch.ones(9, 3), "pos": points, "name": "a"}, tmp_path / "a.pt")
    assert read_points(tmp_path / "a.pt").tolist() == POINTS.tolist()
    assert read_points(tmp_path / "a.pt", "faces").tolist() == [[1.0] * 3] * 9
    for other in (["a", points], torch.nn.Linear(2, 2)):
        torch.save(other, tmp_path / "a.pt")
        with pytest.raises(
            torchweft.DTypeError, match=r"other objects than tensors: .* torch\.save"
        ):
            read_points(tmp_path / "a.pt")


def test_of_several_structures_the_last_is_taken(tmp_path, capsys):
    one = b"3\n\n" + _text("C {} {} {}") + b"\n"
    (tmp_path / "a.xyz").write_bytes(one.replace(b"0.5", b"9") + one)
    assert read_points(tmp_path / "a.xyz").tolist() == POINTS.tolist()
    assert capsys.readouterr().err.endswith("a.xyz: the last of 2 structures is taken\n")


def test_says_that_other_columns_are_unused(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.tile(POINTS, (2, 2)))
    assert read_points(tmp_path / "a.npy").tolist() == POINTS.tolist() * 2
    said = "a.npy: x, y, z are the first 3 of 6 columns, the others are unused\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize(
    ("points", "error", "text"),
    [
        (np.zeros(9), torchweft.ShapeError, r"shape \(9,\): points are rows of x, y, z.*reshape"),
        (np.zeros((9, 2)), torchweft.ShapeError, r"shape \(9, 2\): points are rows of x, y, z"),
        (np.zeros((2, 9, 3)), torchweft.ShapeError, r"shape \(2, 9, 3\): points are rows"),
        (np.zeros((0, 3)), torchweft.ShapeError, r"\(0, 3\), no points: .* Pass another file"),
        (np.full((4, 3), np.nan), torchweft.ShapeError, r"4 points, all with NaN .* Save the po"),
        (np.zeros((9, 3), np.uint8), torchweft.DTypeError, r"uint8, the type of colours: .*int32"),
        (np.zeros((9, 3), complex), torchweft.DTypeError, r"complex128: coordinates are real .*32"),
    ],
)
def test_refuses_arrays_that_are_no_points(tmp_path, points, error, text):
    np.save(tmp_path / "a.npy", points)
    with pytest.raises(error, match=text):
        read_points(tmp_path / "a.npy")
