"""Programs that solve it without any model, each named by its method and the points that it gives."""
