# cmake -DCXX=... -DFLAGS=... -DSOURCES=... -P check_includes.cmake
#
# The kernels of an instruction set are few translation units, in which a file would compile that only uses what others
# included before it. So each is compiled by itself.
foreach(source IN LISTS SOURCES)
  execute_process(COMMAND ${CXX} -std=c++17 -fsyntax-only -w ${FLAGS} -x c++ ${source}
                  RESULT_VARIABLE result ERROR_VARIABLE errors)
  if(NOT result EQUAL 0)
    message(SEND_ERROR "${source} does not include all that it uses:\n${errors}")
  endif()
endforeach()
