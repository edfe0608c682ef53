"""One module a command: its options, and the one call that it makes. `winnow.cli` lists them."""
