"""Plugins of pytest, one for each suite that others wrote (`tests/clients/with_suite.py`)."""
