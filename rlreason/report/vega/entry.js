// All that a page needs of Vega: a parser and a view, and what evaluates expressions without `eval`.
import { View, parse } from "vega";
import { expressionInterpreter } from "vega-interpreter";

window.vega = { View, parse, expressionInterpreter };
