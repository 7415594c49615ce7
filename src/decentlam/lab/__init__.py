"""The lab: problems, studies, plots and the command line. Nothing in the core imports it."""
