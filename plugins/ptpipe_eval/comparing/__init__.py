"""`ptpipe compare`: models of past runs, files and folders side by side.

`subjects` finds what the arguments name, `manifest` composes the manifest of an ordinary run that measures them
together, and `recorded` shows what past runs measured, without measuring again.
"""
