"""Arithmetic about models, formats, rows and memory. Imports no torch."""
