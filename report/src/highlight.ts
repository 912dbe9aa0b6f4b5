// Code in colour, by Prism's grammars; its tokens become elements, its markup is not used.

import Prism from "./prism";
import { type Child, h } from "./dom";

type Token = string | Prism.Token;

function elements(tokens: Token | Token[] | Prism.TokenStream): Child[] {
  if (typeof tokens === "string") return [tokens];
  if (Array.isArray(tokens)) return tokens.flatMap((token) => elements(token));
  return [h("span", { class: `code-${tokens.type}` }, elements(tokens.content))];
}

/** Lines of code, each as the children of an element. */
export function highlighted(code: string, language: string): Child[] {
  const grammar = Prism.languages[language];
  return grammar ? elements(Prism.tokenize(code, grammar)) : [code];
}
