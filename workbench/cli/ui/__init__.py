"""`workbench ui`: a page that shows the runs of a folder while they train, starts runs and asks them."""
