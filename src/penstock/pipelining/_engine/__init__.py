"""How the drop-in's schedules run their rows on the layer below."""
