"""What makers of offloading claim, each part counted, measured on rigs or planned."""
