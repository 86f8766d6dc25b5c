"""A traced model: how it runs on one process, its loss, its stages."""
