"""Measurements and the conformance suite."""
