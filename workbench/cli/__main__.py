"""`python -m workbench.cli`, for launchers that start modules."""

from workbench.cli.verbs import main

if __name__ == "__main__":
    main()
