"""`python -m torrential` is the same as `torrential`: it imports nothing from the current directory."""

from torrential.search_path import drop_current_directory

if __name__ == "__main__":
    drop_current_directory()
    from torrential.cli import main

    main()
