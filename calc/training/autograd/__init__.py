"""What every program is written with: a tape of symbolic tensors, its operators, blocks and their leaves."""
