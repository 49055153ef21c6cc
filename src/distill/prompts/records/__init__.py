"""Records of files and data sets: file types, record formats, and their messages."""
