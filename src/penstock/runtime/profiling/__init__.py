"""Measures what stages, or layers, of a model cost: times, memory, and messages between ranks.

``stage_times.py`` times one stage, ``stage_memory.py`` counts its bytes, ``profile.py`` goes through all stages and
probes the links, and ``result.py`` is what it returns.
"""

from penstock.runtime.profiling.profile import profile
from penstock.runtime.profiling.result import Profile, Quartiles

__all__ = ["Profile", "Quartiles", "profile"]
