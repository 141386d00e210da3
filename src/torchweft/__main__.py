"""`python -m torchweft` is the command `torchweft`."""

from torchweft.cli import main

raise SystemExit(main())
