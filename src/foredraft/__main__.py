"""python -m foredraft: the command `foredraft`."""

from foredraft.cli import main

if __name__ == "__main__":
    main()
