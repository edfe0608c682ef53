"""The recipe of the demo model: data, tasks, training and evaluation. Not part of the package."""
