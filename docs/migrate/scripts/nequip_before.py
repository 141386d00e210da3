"""Forces on four atoms of carbon by a model of NequIP."""

from ase import Atoms
from nequip.data import AtomicDataDict, from_ase
from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state

set_global_state()
settings = {"r_max": 4.0, "type_names": ["C"], "avg_num_neighbors": 3.0}
model = NequIPGNNModel(seed=0, model_dtype="float32", **settings)

types = ChemicalSpeciesToAtomTypeMapper(["C"], {"C": "C"})
atoms = Atoms("C4", [[0, 0, 0], [1.3, 0, 0], [0, 1.4, 0], [0, 0, 1.5]])
data = NeighborListTransform(r_max=4.0)(types(from_ase(atoms)))
result = model(AtomicDataDict.batched_from_list([data]))["forces"]
print(result)
