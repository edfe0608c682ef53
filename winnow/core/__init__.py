"""Decisions: which request runs, which page is whose. Imports no torch, reads no clock."""
