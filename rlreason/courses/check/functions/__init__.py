"""What is tried of each function of a handout: its cases, what is observed of a call, and its known mistakes."""
