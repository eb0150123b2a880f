"""Engine metadata to the values of the cache interface: views, never copies, and no kernel is called here."""
