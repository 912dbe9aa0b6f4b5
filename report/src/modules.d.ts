declare module "prismjs/components/prism-core" {
  import Prism from "prismjs";
  export = Prism;
}
declare module "prismjs/components/*";
declare module "worker:*" {
  const text: string;
  export default text;
}
