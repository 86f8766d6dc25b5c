"""Writes plans as the settings of training frameworks."""
