"""Saves a pipeline, and loads it on the same layout or another one.

``state.py`` is what ``pipe.state_dict`` returns: ``names.py`` names it, ``model_state.py`` and ``optimizer_state.py``
collect and restore it.
"""
