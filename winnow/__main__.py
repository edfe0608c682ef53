"""`python -m winnow` is the command `winnow`."""

from winnow.cli import main

raise SystemExit(main())
