"""Trains a parameter that several stages hold as one: both front doors sum its gradients once per step.

``gradients.py`` sums them over ``exchange.py``; ``drift.py`` notices when the holders come apart.
"""
