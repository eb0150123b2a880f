"""The documented cache interface: geometry, addressing, values, quantisation and inspection. torch only."""
