"""The pool inside engines that are not ours: one folder an engine, one extra each."""
