"""The pool: everything that decides. Public names are exported by `ninfer_pool`."""
