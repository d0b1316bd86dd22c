"""What a run is asked to do: typed keys, the rules between them, and how Hydra learns of both."""
