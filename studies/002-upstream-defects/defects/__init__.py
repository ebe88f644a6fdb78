"""One module for each defect; `catalogue` lists them, `worker` runs one in a process of its own."""
