"""Models of other libraries as modules of torchweft, with their weights."""
