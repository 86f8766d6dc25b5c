"""Traces a model with torch.export, and cuts its graph into stages: anywhere, also inside a module's forward."""
