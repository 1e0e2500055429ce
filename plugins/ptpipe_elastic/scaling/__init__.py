"""`ptpipe scaling`: measure how a training stage scales with its workers, fit scaling laws, predict larger numbers."""
