"""python -m torrential.testing --schedules 10000 --jobs 2, or --seed N for one of them again."""

from torrential.search_path import drop_current_directory

if __name__ == "__main__":
    drop_current_directory()
    from torrential.testing.command import main

    main()
