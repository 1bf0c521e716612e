"""`python -m hvdtrain`, as torchrun starts it."""

from hvdtrain.cli import main

main()
