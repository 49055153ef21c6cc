"""Records of files and data sets: kinds of files, forms of records, and the messages that they give."""
