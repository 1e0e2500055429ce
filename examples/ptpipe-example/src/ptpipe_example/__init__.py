"""A network and a data set for ptpipe, as a distribution of its own."""
