"""`workbench plan`: memory and time of each recipe before it runs."""
