"""Study 005: predictions of the planner beside what was measured, published and allocated."""
