"""Saves a pipeline, and loads it on the same layout or another one.

``save.py`` and ``load.py`` are what a script calls; ``background.py`` saves in a thread, from the copies of
``snapshot.py``. ``contents.py`` collects what a rank saves, ``fitting.py`` compares it with what there is when it is
loaded, ``own_state.py`` restores what belongs to ranks, such as ``random_states.py``.

On disk, ``folders.py`` keeps complete checkpoints apart from others. In each, ``data_files.py`` writes tensors, in part
with ``direct_writes.py``, and ``index.py`` lists them; ``encoding.py`` encodes everything else without pickle;
``reading.py`` lets ``torch.distributed.checkpoint`` read it all. ``channel.py`` connects ranks, ``replicas.py`` those
of all replicas, and ``saves.py`` remembers both from one save to the next.

``state.py`` is what ``pipe.state_dict`` returns: ``names.py`` names it, ``model_state.py`` and ``optimizer_state.py``
collect and restore it. ``export.py`` writes the unsplit model.
"""
