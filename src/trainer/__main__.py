"""``python -m trainer`` (and so ``torchrun -m trainer``) is the ``trainer`` command."""

import sys

from trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
