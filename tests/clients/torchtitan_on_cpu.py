"""torchtitan's own trainer on CPUs: what it asks a GPU for is answered here, and then its program runs as it is."""

import sys
from types import ModuleType, SimpleNamespace

import torch

ANSWERS = {
    "current_device": 0,
    "get_device_name": "CPU",
    "get_device_properties": SimpleNamespace(total_memory=2**30),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
    "empty_cache": None,
}

torch.set_num_threads(1)
torch._utils._get_available_device_type = lambda: "cpu"
for name, answer in ANSWERS.items():
    setattr(torch.cpu, name, lambda *_, answer=answer: answer)

# Kernels for experts, which need Triton to be imported; a dense model has no experts.
kernels = sys.modules["torchtitan.models.moe.kernels"] = ModuleType("torchtitan.models.moe.kernels")
kernels.generate_permute_indices = None

if __name__ == "__main__":
    from torchtitan.train import Trainer, main

    main(Trainer)
