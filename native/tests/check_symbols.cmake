# cmake -DNM=... -DISA=... -DOBJECTS=... -P check_symbols.cmake
#
# The linker keeps one copy of each inline function or template that several objects have. Were it one that an object
# compiled for a newer processor brings, other paths would run instructions which theirs does not have. So what is
# compiled for an instruction set may share nothing: each such symbol must be of its own namespace.
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} --demangle ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ [WVu] [^\n]+" shared "${symbols}")
  foreach(symbol IN LISTS shared)
    if(NOT symbol MATCHES "jaxis::${ISA}::|DW\\.ref\\.")
      message(SEND_ERROR "${object} defines, for the linker to merge with others: ${symbol}")
    endif()
  endforeach()
endforeach()
