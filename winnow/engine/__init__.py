"""Doing what core decides: storage, inputs, steps, text."""
