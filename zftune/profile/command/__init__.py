"""`zftune profile -- CMD`: start the command, keep its descendants together, read what the agents wrote."""
