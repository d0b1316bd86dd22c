"""Problems from files, from a hub, or made up on the spot."""
