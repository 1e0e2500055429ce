"""`python -m ptpipe` is `ptpipe`."""

from ptpipe.cli import main

if __name__ == "__main__":
    main()
