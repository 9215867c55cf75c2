"""Methods that train some or all of the backbone's own weights."""
