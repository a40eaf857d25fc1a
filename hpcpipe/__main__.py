"""`python -m hpcpipe`, for where the console script is not on the PATH of every rank."""

from hpcpipe.cli.main import main

main()
